"""An HTTP server that answers, breaks off or ends as the path says; the front's engine in tests.

    python fake_server.py [--accept-after FILE] [--child] ... --port=N

| path | |
|---|---|
| /echo | the request's head and body |
| /events | two events, the second once the file of the query is there |
| /break | an event and the beginning of another, then the process is gone |
| /half | ten bytes of a hundred, then the process is gone |
| /nothing | the process is gone |
| /wait?FILE | nothing; makes FILE when the client has left |
| /end?CODE | the process ends with CODE |
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body, method=b"GET"):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + (b"" if method == b"HEAD" else body)


def gone():
    os.kill(os.getpid(), signal.SIGKILL)


def serve(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    method, target = head.split(b" ")[:2]
    path, _, query = target.decode().partition("?")
    if path == "/echo":
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if b"100-continue" in head:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(body) < size:
            body += connection.recv(65536)
        connection.sendall(whole(head + b"\n\n" + body, method))
    elif path == "/events":
        connection.sendall(EVENTS + chunk(b"data: 1\n\n"))
        while not os.path.exists(query):
            time.sleep(0.01)
        connection.sendall(chunk(b"data: [DONE]\n\n") + chunk(b""))
    elif path == "/break":
        connection.sendall(EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n")[:-5])
        time.sleep(0.2)         # what was sent is not lost with the process
        gone()
    elif path == "/half":
        connection.sendall(whole(b"x" * 100)[:-90])
        time.sleep(0.2)
        gone()
    elif path == "/nothing":
        gone()
    elif path == "/wait":
        assert connection.recv(1) == b""
        pathlib.Path(query).touch()
    elif path == "/end":
        os._exit(int(query))
    else:
        connection.sendall(whole(b"{}"))
    connection.close()


def main(argv):
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(argv[-1].removeprefix("--port="))))
    listening.listen()
    if "--child" in argv:
        sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                                   start_new_session=True)
        sleeper.send_signal(signal.SIGSTOP)
    if "--accept-after" in argv:
        while not os.path.exists(argv[argv.index("--accept-after") + 1]):
            time.sleep(0.01)
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
