# What python3 -c runs: it says that it is there, and then loads the driver,
# which the agent sends. A context can be given code while that goes on.
import _signal, os
def start():
    _signal.signal(2, lambda *_: None)
    requests = open(3, "rb", 0, closefd=False)  # no byte more than is wanted: the driver reads on
    secret = requests.readline().strip()
    os.write(3, b"\n" + secret + b'{"type":"ready"}\n')
    driver = {"__name__": "sandboxd", "requests": requests, "secret": secret, "memory": int(requests.readline())}
    size, source = int(requests.readline()), b""
    while len(source) < size:
        source += requests.read(size - len(source)) or exit()
    exec(compile(source, "<sandboxd>", "exec"), driver)
    driver["serve"]()
start()
