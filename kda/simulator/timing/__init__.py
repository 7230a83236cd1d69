"""Predicted time: what chips do, what each instruction costs on them, and what a clocked launch says."""
