package spec

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func TestParsePublish(t *testing.T) {
	for text, want := range map[string]string{
		"8080:80":                             "[{127.0.0.1:8080 80}]",
		"8080:80/tcp":                         "[{127.0.0.1:8080 80}]",
		"0.0.0.0:1:65535, 127.0.0.2:2:2":      "[{0.0.0.0:1 65535} {127.0.0.2:2 2}]",
		"[::1]:8080:80,127.0.0.1:8080:81":     "[{[::1]:8080 80} {127.0.0.1:8080 81}]",
		"[::ffff:127.0.0.1]:8080:80":          "[{127.0.0.1:8080 80}]",
		"0.0.0.0:80:80,[::]:80:80":            "[{0.0.0.0:80 80} {[::]:80 80}]",
		"127.0.0.1:8080:80,127.0.0.2:8080:80": "[{127.0.0.1:8080 80} {127.0.0.2:8080 80}]",
	} {
		if got, err := parsePublish(text); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	var many []string
	for i := range maxPublish + 1 {
		many = append(many, fmt.Sprintf("%d:80", 1000+i))
	}
	for _, text := range []string{
		"", "80", ":80", "80:", "0:80", "80:0", "65536:80", "80:65536", "080:80", "80:080", "+80:80", "80:+80", "-1:80", "a:b", "80:80/udp",
		"80:80/",
		"localhost:80:80", "1.2.3:80:80", "01.2.3.4:80:80", "::1:80:80", "[::1:80:80", "[127.0.0.1]:80:80", "[fe80::1%lo]:80:80",
		"[fe80::1%25lo]:80:80", "*:80:80", ":80:80", "1.2.3.4:1:2:3",
		"80:80,", "80:80,,81:81", "80:80,80:81", "0.0.0.0:80:80,127.0.0.1:80:80", "[::]:80:80,[::1]:80:81", "80:44772", "80:18080",
		"80-90:80-90", strings.Join(many, ","), "8\x000:80",
	} {
		if got, err := parsePublish(text); !errs.Is(err, errs.Invalid) ||
			len(httperr.Clip(text, 100)) < 80 && !strings.Contains(err.Error(), "sandboxd.publish") {
			t.Errorf("%.60q: %v, %v", text, got, err)
		}
	}
}
