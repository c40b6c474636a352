"""Parts that every host framework needs, each written once."""
