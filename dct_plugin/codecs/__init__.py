"""Wire formats: header and payload, index encodings, value types, messages."""
