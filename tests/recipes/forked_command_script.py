"""``forked_command_script.py SOCKET SCRIPT ARGUMENTS``: a command in a fork of the recipes' server."""

import json
import os
import signal
import socket
import sys

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
request = [sys.argv[2], sys.argv[3:], os.getcwd(), dict(os.environ)]
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
status = int(connection.recv(16))
sys.exit(status if status >= 0 else 128 - status)
