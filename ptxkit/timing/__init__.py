"""Predicted time: constants of chips, costs of instructions, and the results of a launch with a clock."""
