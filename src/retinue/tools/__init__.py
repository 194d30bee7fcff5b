"""What an author and an operator run."""
