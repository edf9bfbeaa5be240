"""Trainings in processes of their own, measured in turns, and the hosts that they run on."""
