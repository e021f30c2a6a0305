"""How ranks find each other, and what they know of one that never comes."""
