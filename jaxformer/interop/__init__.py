"""Exchange of weights with other libraries' folders."""
