"""Lets the tests of all rooms import what they share from this folder."""
