"""Host frameworks: each folder connects one of them to the library; nothing in the library imports from here."""
