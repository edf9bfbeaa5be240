"""The toolbox of compiled loops: how they are compiled, one hash function, one hash table, vectors."""
