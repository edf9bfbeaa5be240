"""Who may use a server: keys and tokens, files that are this user's alone, one run at a time."""
