package diff

// levelCost is about what a level takes beside its names, in bytes.
const levelCost = 128

// A descent is the way from the tops of the trees to the present directory. A guest
// decides how long it is, so only some of its directories are open: the last ones, and of
// the others those whose number is a multiple of stride. A closed one is opened again,
// from the nearest open one above it, when the walk comes back to it. So a way of n
// directories costs some 2n openings, and never more descriptors than allowed.
type descent struct {
	levels []level
	opened []int  // the levels that are open, outermost first
	stride int    // 0 counts as 1
	path   []byte // of the present directory, or of the last one whose path is not too long
	short  int    // how many levels, the outermost ones, have a path that is not too long
	told   int    // how many of these are reported
}

// A level is a directory on the way.
type level struct {
	name  string   // in the level above
	names []string // that are still to be compared, in order
	end   int      // of its path
	held  int      // bytes of names that were held before it was entered
	long  bool     // its path is too long
	added bool     // the base has no such directory: everything in it is new
	told  bool     // it is reported
	open  *dirs    // nil: closed
}

func (d *descent) present() *level { return &d.levels[len(d.levels)-1] }

// pathOf is the path of a name in the present directory.
func (d *descent) pathOf(name string) string { return string(d.path) + "/" + name }

// tooLong reports whether a name in the present directory has a path that is too long.
func (d *descent) tooLong(name string) bool {
	return d.present().long || len(d.path)+1+len(name) > maxPath
}

// enter goes down into a directory, whose level has no names yet.
func (d *differ) enter(l level, at *dirs) (err error) {
	if l.added {
		at.b = node{}
	}
	l.open, l.held = at, d.held.Bytes
	d.held.Bytes += levelCost
	if l.names, err = d.names(at); err != nil {
		d.held.Bytes = l.held
		d.close(at)
		return err
	}
	if !l.long {
		if len(d.levels) > 0 {
			d.path = append(append(d.path, '/'), l.name...)
		}
		d.short++
		if l.told {
			d.told = d.short
		}
	}
	l.end = len(d.path)
	d.opened = append(d.opened, len(d.levels))
	d.levels = append(d.levels, l)
	d.spare()
	return nil
}

// leave goes up.
func (d *differ) leave() {
	l := d.present()
	if l.open != nil {
		d.close(l.open)
		d.opened = d.opened[:len(d.opened)-1]
	}
	d.held.Bytes = l.held
	if !l.long {
		d.short--
		d.told = min(d.told, d.short)
		d.path = d.path[:max(0, l.end-len(l.name)-1)]
	}
	d.levels = d.levels[:len(d.levels)-1]
}

func (d *differ) leaveAll() {
	for len(d.levels) > 0 {
		d.leave()
	}
}

// reach returns the present directory, and opens it again if it was closed. It returns nil
// if it is no longer there.
func (d *differ) reach() (*dirs, error) {
	i := d.opened[len(d.opened)-1] // the top is never closed
	for i < len(d.levels)-1 {
		next := &d.levels[i+1]
		at, err := d.find(d.levels[i].open, next.name)
		if err != nil {
			return nil, err
		}
		if !at.a.dir {
			d.close(at)
			return nil, nil
		}
		if next.added {
			at.b = node{}
		}
		i++
		next.open = at
		d.opened = append(d.opened, i)
		d.spare()
	}
	return d.levels[i].open, nil
}

// spare closes directories if too many are open, but not the top and the last.
func (d *differ) spare() {
	if d.fds <= d.maxOpen {
		return
	}
	last := len(d.opened) - 1
	kept := func(i int) bool { return d.opened[i]%max(1, d.stride) == 0 }
	for many := true; many; {
		n := 0
		for i := 1; i < last; i++ {
			if kept(i) {
				n += len(d.levels[d.opened[i]].open.all)
			}
		}
		if many = n > d.maxOpen/4; many {
			d.stride = max(1, d.stride) * 2
		}
	}
	stay := d.opened[:0]
	for i, n := range d.opened {
		if i == 0 || i == last || kept(i) || d.fds <= d.maxOpen/2 {
			stay = append(stay, n)
			continue
		}
		d.close(d.levels[n].open)
		d.levels[n].open = nil
	}
	d.opened = stay
}
