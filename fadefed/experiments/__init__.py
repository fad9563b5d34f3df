"""Published results, reproduced by one command each."""
