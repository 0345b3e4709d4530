"""Locks of the files in a directory: locks.py DIR reads an expression a line, and prints its value."""
import errno, fcntl, os, signal, sqlite3, struct, sys
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN

OFD_SETLK, OFD_SETLKW = 37, 38
files = {}


class Interrupted(Exception):
    pass


def opened(name='f'):
    if name not in files:
        files[name] = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
    return files[name]


def said(f, *args):
    try:
        f(*args)
        return 'ok'
    except OSError as e:
        return errno.errorcode[e.errno]


def flock(how, name='f'):
    return said(fcntl.flock, opened(name), how)


def lock(how, start=0, length=0, name='f'):
    return said(fcntl.lockf, opened(name), how, length, start)


def ofd(how, start=0, length=0, name='f'):
    type = {LOCK_SH: fcntl.F_RDLCK, LOCK_EX: fcntl.F_WRLCK, LOCK_UN: fcntl.F_UNLCK}[how & ~LOCK_NB]
    wait = OFD_SETLK if how & LOCK_NB else OFD_SETLKW
    return said(fcntl.fcntl, opened(name), wait, struct.pack('hhqqi4x', type, 0, start, length, 0))


def asked(start=0, length=0, name='f'):
    """Whose lock a write lock of the range would meet (F_GETLK): its type, start and length."""
    got = fcntl.fcntl(opened(name), fcntl.F_GETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, start, length, 0))
    type, _, start, length, _ = struct.unpack('hhqqi4x', got)
    return 'free' if type == fcntl.F_UNLCK else ({fcntl.F_RDLCK: 'read', fcntl.F_WRLCK: 'write'}[type], start, length)


def many():
    """How many ranges can be locked, what the next one gives, and what unlocking gives then: in the middle, at an end."""
    lock(LOCK_EX | LOCK_NB, 0, 100)
    n = 1
    while (last := lock(LOCK_EX | LOCK_NB, 100 + 2 * n, 1)) == 'ok':
        n += 1
    return n, last, lock(LOCK_UN, 50, 1), lock(LOCK_UN, 0, 50)


def closed(name='f'):
    os.close(files.pop(name))
    return 'ok'


def interrupted(f, *args):
    """A call that waits, and is interrupted after a tenth of a second."""
    def on(*_):
        raise Interrupted
    signal.signal(signal.SIGALRM, on)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        return f(*args)
    except Interrupted:
        return 'interrupted'


def made(mode):
    """Makes a database. SQLite changes the journal of one that another process has open only at once, or fails."""
    db = sqlite3.connect(mode, isolation_level=None)
    said = db.execute('pragma journal_mode=' + mode).fetchone()[0]
    db.execute('create table t (who, n)')
    db.close()
    return said


def insert(mode, n, who):
    """Commits n rows, one by one, into a database that others write to, too; counts what is acknowledged."""
    db = sqlite3.connect(mode, timeout=100, isolation_level=None)
    done = 0
    for i in range(n):
        db.execute('begin immediate')
        db.execute('insert into t values (?, ?)', (who, i))
        db.execute('commit')
        done += 1
    db.close()
    return done


def rows(mode):
    db = sqlite3.connect(mode, timeout=100)
    said = db.execute('pragma integrity_check').fetchone()[0], db.execute('select count(*), count(distinct who || n) from t').fetchone()
    db.close()
    return said


def append(n, who):
    fd = os.open('log', os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for i in range(n):
        os.write(fd, b'%s %05d\n' % (who.encode(), i))
    os.close(fd)
    return n


def appended():
    with open('log') as f:
        lines = f.read().splitlines()
    return len(lines), len(set(lines)), {len(l) for l in lines}


os.chdir(sys.argv[1])
print('here', flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except Exception as why:
        print(repr(why), flush=True)
