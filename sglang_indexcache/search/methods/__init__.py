"""How a search descends, one method a file."""
