"""What is promised to a user, what was released, and epsilon."""
