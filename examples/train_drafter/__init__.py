"""Train a DSpark drafter for a small Llama-shaped target; README.md has the commands."""
