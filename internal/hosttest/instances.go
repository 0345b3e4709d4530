package hosttest

import (
	"cmp"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// Instances are the two instances of sandboxd that tests may use. SANDBOXD_TEST_INSTANCE
// gives both as two letters; "tu" if it is empty.
func Instances() (first, second instance.Instance) {
	letters := cmp.Or(os.Getenv("SANDBOXD_TEST_INSTANCE"), "tu")
	if len(letters) != 2 || letters[0] == letters[1] {
		panic(fmt.Sprintf("SANDBOXD_TEST_INSTANCE is %q: want two different letters, as tu", letters))
	}
	for i, of := range []*instance.Instance{&first, &second} {
		parsed, err := instance.Parse(letters[i : i+1])
		if err != nil {
			panic("SANDBOXD_TEST_INSTANCE: " + err.Error())
		}
		*of = parsed
	}
	return first, second
}
