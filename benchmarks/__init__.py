"""Programs that measure kda, and those that write the pages of what was measured; README.md says which is which."""
