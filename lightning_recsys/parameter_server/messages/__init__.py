"""The messages between clients and servers, and the sockets that they travel by."""
