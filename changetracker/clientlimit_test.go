package changetracker_test

import (
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
)

func TestParseClientLimit(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]changetracker.ClientLimit{
		"rate=20":                          {PerSecond: 20},
		"open=100":                         {Open: 100},
		" rate=20 , drop":                  {PerSecond: 20, Drop: true},
		"open=5,ipv6=48,rate=1,burst=3":    {PerSecond: 1, Burst: 3, Open: 5, IPv6Bits: 48},
		"rate=10000,ipv4=24,ipv6=128,drop": {PerSecond: 10_000, IPv4Bits: 24, IPv6Bits: 128, Drop: true},
	} {
		got, err := changetracker.ParseClientLimit(text)
		if err != nil || got != want {
			t.Errorf("%q is %+v, %v, want %+v", text, got, err, want)
		}
		if again, err := changetracker.ParseClientLimit(got.String()); err != nil || again != got {
			t.Errorf("%q prints as %q, which is %+v, %v", text, got.String(), again, err)
		}
	}
	for text, want := range map[string]string{
		"":                         "unknown",
		"burst=5":                  "nothing is limited",
		"open=5,burst=5":           "burst is of a rate",
		"open=1001":                "to 1000",
		"drop":                     "nothing is limited",
		"rate=0":                   "want a number from 1",
		"rate=-1":                  "want a number from 1",
		"rate=10001":               "to 10000",
		"rate=1,rate=2":            "twice",
		"rate=1,drop=yes":          "unknown \"drop\"",
		"rate=1,ipv4=33":           "to 32",
		"rate=1,ipv6=129":          "to 128",
		"rate=1,":                  "unknown \"\"",
		"speed=1":                  "unknown \"speed\"",
		strings.Repeat("rate", 99): "want 128 at most",
	} {
		if got, err := changetracker.ParseClientLimit(text); err == nil || !strings.Contains(err.Error(), want) || got != (changetracker.ClientLimit{}) {
			t.Errorf("%q is %+v, %v, want an error with %q", text, got, err, want)
		}
	}
}

func TestClientLimit(t *testing.T) {
	t.Parallel()
	var none changetracker.ClientLimit
	if !none.IsZero() || none.String() != "" || !(changetracker.ClientLimit{Burst: 5, Drop: true}).IsZero() {
		t.Error("what limits nothing is a limit")
	}
	for _, c := range []struct {
		limit  changetracker.ClientLimit
		v4, v6 int
	}{
		{none, 32, 64}, {changetracker.ClientLimit{IPv4Bits: 24, IPv6Bits: 56}, 24, 56},
	} {
		if v4, v6 := c.limit.Bits(false), c.limit.Bits(true); v4 != c.v4 || v6 != c.v6 {
			t.Errorf("%+v has %d and %d bits, want %d and %d", c.limit, v4, v6, c.v4, c.v6)
		}
	}
}

func FuzzParseClientLimit(f *testing.F) {
	f.Add("rate=20,burst=40,open=100,ipv4=24,ipv6=56,drop")
	f.Add("open=1, rate=1")
	f.Fuzz(func(t *testing.T, text string) {
		l, err := changetracker.ParseClientLimit(text)
		if err != nil {
			if l != (changetracker.ClientLimit{}) || len(err.Error()) > 700 {
				t.Errorf("%q: %+v with error %v", text, l, err)
			}
			return
		}
		if again, err := changetracker.ParseClientLimit(l.String()); err != nil || again != l {
			t.Errorf("%q is %+v, and prints as %q: %+v, %v", text, l, l.String(), again, err)
		}
	})
}
