"""`kda.decode_step`: one token, or some draft tokens, of every running sequence (docs/serving.md)."""
