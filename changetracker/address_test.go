package changetracker

import "testing"

func TestParsePrefixIsLenientAndCanonical(t *testing.T) { // TRK-12, TRK-15
	for text, want := range map[string]string{
		"10.0.0.0/8":              "10.0.0.0/8",
		" 10.1.2.3/8\n":           "10.0.0.0/8",
		"010.000.000.000/8":       "10.0.0.0/8",
		"0.0.0.0/0":               "0.0.0.0/0",
		"fd00::1/8":               "fd00::/8",
		"::/0":                    "::/0",
		"::ffff:10.1.0.0/112":     "10.1.0.0/16",
		"::ffff:0.0.0.0/96":       "0.0.0.0/0",
		"::ffff:0:0/95":           "::fffe:0:0/95",
		"10.0.0.1":                "",
		"10.0.0.1/33":             "",
		"10.0.0.1/-1":             "",
		"fe80::1%eth0/64":         "",
		"10.0.0.0/8,192.168.0./1": "",
		"":                        "",
	} {
		got := ""
		if p, ok := ParsePrefix(text); ok {
			got = p.String()
		}
		if got != want {
			t.Errorf("ParsePrefix(%q) = %q, want %q", text, got, want)
		}
	}
}
