"""Shared helpers of the test suite: engines, bitwise comparison, storages alive, event logs, random bodies."""
