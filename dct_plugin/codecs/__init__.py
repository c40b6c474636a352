"""Wire formats: header and payload, positions, value types, messages."""
