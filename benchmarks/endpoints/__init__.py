"""The same small endpoint by each server: JSON with a number comes, and goes back after a call of the device.

Each is a program that takes its port, and its wait for company in milliseconds where it has one. One process,
replica or worker has the device.
"""
