"""Host frameworks: each folder connects one to the library; nothing in the library imports from here."""
