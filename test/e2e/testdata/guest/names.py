"""Names and open files, as rename(2), link(2) and unlink(2) say, asked step by step.

names.py DIR         does all of it in DIR, which is empty, and prints an answer a line
names.py DIR GO      the same; while it holds files open it waits until GO can be read, and
                     prints once more what it has
"""
import ctypes, errno, os, sys

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, NOREPLACE, EXCHANGE = -100, 1, 2


def rename(old, new, flags=0):
    if libc.renameat2(AT_FDCWD, old.encode(), AT_FDCWD, new.encode(), flags) != 0:
        raise OSError(ctypes.get_errno(), 'renameat2')


def put(name, text):
    with open(name, 'x') as f:
        f.write(text)


def read(name):
    with open(name) as f:
        return f.read()


def said(f, *args):
    try:
        return f(*args)
    except OSError as e:
        return errno.errorcode[e.errno]


def seen(names):
    """All that can be asked about names: listed, stat, contents, links."""
    listed = sorted(os.listdir('.'))
    return listed, [(n, said(os.path.lexists, n), said(read, n), said(lambda: os.stat(n).st_nlink)) for n in names]


def tell(what, *answer):
    print(what, *answer, flush=True)


def chapter(name):
    os.mkdir(name)
    os.chdir(name)


def links():
    put('f', 'x'); os.link('f', 'f1')
    tell('link onto link', said(rename, 'f', 'f1'), seen(['f', 'f1']))
    tell('and back', said(rename, 'f1', 'f'), seen(['f', 'f1']))
    tell('made where it is', said(put, 'f', 'y'), said(os.symlink, 'z', 'f1'))
    tell('noreplace', said(rename, 'f', 'f1', NOREPLACE), seen(['f', 'f1']))
    tell('exchanged', said(rename, 'f', 'f1', EXCHANGE), seen(['f', 'f1']))
    os.mkdir('d'); os.link('f', 'd/f')
    tell('into a directory', said(rename, 'f', 'd/f'), seen(['f', 'f1', 'd/f']), os.listdir('d'))
    with open('f', 'a') as w:
        w.write('!')
    tell('written', seen(['f', 'f1', 'd/f']))
    tell('removed', said(os.unlink, 'f'), seen(['f', 'f1', 'd/f']))
    tell('made again', said(put, 'f', 'new'), seen(['f', 'f1', 'd/f']))
    tell('over it', said(rename, 'f', 'f1'), seen(['f', 'f1', 'd/f']))
    os.symlink('f1', 'l'); os.link('l', 'l1', follow_symlinks=False)
    tell('links of a symlink', said(rename, 'l', 'l1'), sorted(os.listdir('.')), os.readlink('l'), os.readlink('l1'))


def itself():
    put('f', 'x'); os.mkdir('d')
    tell('a file', said(rename, 'f', 'f'), said(rename, 'f', './f'), said(rename, 'f', 'd/../f'), seen(['f']))
    tell('a directory', said(rename, 'd', 'd'), said(rename, 'd', 'd/'), said(rename, 'd', 'd/e'), sorted(os.listdir('.')))
    tell('noreplace', said(rename, 'f', 'f', NOREPLACE), said(rename, 'd', 'd', NOREPLACE), seen(['f']))
    tell('exchanged', said(rename, 'f', 'f', EXCHANGE), seen(['f']))


def exchange():
    put('a', '1'); put('b', '2'); os.mkdir('d'); put('d/in', '3')
    tell('files', said(rename, 'a', 'b', EXCHANGE), seen(['a', 'b']))
    tell('file and directory', said(rename, 'a', 'd', EXCHANGE), seen(['d', 'a/in', 'd/in']))
    tell('with its own parent', said(rename, 'a/in', 'a', EXCHANGE), said(rename, 'a', 'a/in', EXCHANGE), seen(['a/in']))
    tell('with nothing', said(rename, 'b', 'none', EXCHANGE), said(rename, 'none', 'b', EXCHANGE), seen(['b', 'none']))
    tell('noreplace', said(rename, 'b', 'd', NOREPLACE), said(rename, 'b', 'new', NOREPLACE), seen(['b', 'd', 'new']))
    tell('both flags', said(rename, 'b', 'd', NOREPLACE | EXCHANGE))
    os.mkdir('e')
    tell('directories', said(rename, 'a', 'e'), seen(['a/in', 'e/in']), said(rename, 'e', 'd'), said(rename, 'd', 'e'))
    os.mkdir('g')
    tell('a full one is not replaced', said(rename, 'g', 'e'), said(rename, 'e', 'g'), seen(['e/in', 'g/in']))


def absent():
    """What was looked for in vain is there when it was made, in whichever way."""
    put('f', 'x'); put('g', 'y')
    for n in 'bcdef':
        os.path.exists('n' + n)
    os.link('f', 'nb'); rename('g', 'nc'); os.symlink('f', 'nd'); os.mkdir('ne')
    tell('there', seen(['nb', 'nc', 'nd']), os.path.isdir('ne'))
    for n in ('nb', 'nc', 'nd'):
        os.unlink(n)
    os.rmdir('ne')
    tell('gone', seen(['nb', 'nc', 'nd']), os.path.isdir('ne'))


held = {}


def hold():
    """Files that are open while their names change."""
    for n in ('gone', 'again', 'linked', 'replaced', 'moved', 'onto', 'swapped'):
        put(n, n); held[n] = open(n, 'r+')
    os.link('linked', 'other'); os.link('onto', 'onto1'); put('by', 'by'); put('with', 'with')
    os.unlink('gone'); os.unlink('again'); put('again', 'second')
    os.unlink('linked'); rename('by', 'replaced'); rename('moved', 'to')
    rename('onto', 'onto1'); rename('swapped', 'with', EXCHANGE)
    os.mkdir('dir'); held['dir'] = os.open('dir', os.O_RDONLY); os.rmdir('dir')


NAMES = ['gone', 'again', 'linked', 'other', 'replaced', 'moved', 'to', 'onto', 'onto1', 'swapped', 'with', 'by']


def holds():
    def of(f):
        f.seek(0)
        return f.read(), os.fstat(f.fileno()).st_nlink
    tell('held', [(n, of(f)) for n, f in held.items() if n != 'dir'])
    tell('same file', [(n, m, said(lambda: os.path.sameopenfile(held[n].fileno(), os.open(m, os.O_RDONLY)))) for n, m in
         (('again', 'again'), ('linked', 'other'), ('moved', 'to'), ('onto', 'onto'), ('onto', 'onto1'), ('swapped', 'with'))])
    tell('named', seen(NAMES))
    tell('a removed directory', said(os.listdir, held['dir']), said(lambda: os.open('in', os.O_CREAT | os.O_WRONLY, dir_fd=held['dir'])))


def write():
    """What is written through a descriptor is where its file is."""
    for n, f in held.items():
        if n != 'dir':
            f.seek(0, 2); f.write('+'); f.flush()
    tell('written', [(n, said(read, n)) for n in NAMES])


os.chdir(sys.argv[1])
top = os.getcwd()
for part in (links, itself, exchange, absent, hold):
    os.chdir(top)
    chapter(part.__name__)
    tell('-- ' + part.__name__)
    part()
holds()
if sys.argv[2:]:
    with open(sys.argv[2]) as go:
        go.read()
    holds()
write()
holds()
