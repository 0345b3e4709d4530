package failpoint

import "testing"

func TestArm(t *testing.T) {
	t.Cleanup(func() { arm("") })
	for _, c := range []struct {
		arm  string
		pass []string
		hit  int // the pass that fails, from 0; -1: none
	}{
		{"", []string{"kill", "kill"}, -1},
		{"kill=error", []string{"freeze", "kill", "kill"}, 1},
		{"kill:2=error", []string{"kill", "kill", "kill"}, 1},
		{"up:egress=error", []string{"up", "up:egress"}, 1},
		{"after:up:egress:3=error", []string{"after:up:egress", "after:up:egress", "after:up:egress"}, 2},
	} {
		arm(c.arm)
		for i, p := range c.pass {
			if err := Pass(p); (err != nil) != (i == c.hit) {
				t.Errorf("%s: pass %d of %s: %v", c.arm, i, p, err)
			}
		}
	}
}
