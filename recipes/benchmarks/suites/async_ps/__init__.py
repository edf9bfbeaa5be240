"""Asynchronous parameter servers: their speed beside other strategies, and what thousands of workers learn."""
