"""Where elastic workers come from."""
