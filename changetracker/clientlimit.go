package changetracker

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ClientLimit bounds the connections that one client opens to a service port at its external IPs and load balancer IPs. The
// zero ClientLimit is none. Options.DecorateService sets it; the API has no field for it.
//
// A client is a source address, or all addresses with the same first bits. Each node counts alone, and each of these IPs is
// counted alone. A datagram of a new flow counts as a connection. Clients whose address is translated before they arrive, by
// a cloud's load balancer for example, are one client.
//
// This keeps a client from taking too much. It is no defence against floods: who sends from many addresses is many clients,
// and an engine bounds how many clients it remembers: see docs/ENGINES.md. Clients that do not fit are not limited.
type ClientLimit struct {
	// PerSecond is how many connections a client may open in a second, on average; 0 is any number. Burst is how many it may
	// open at once after a pause; if it is less than PerSecond, it counts as PerSecond.
	PerSecond, Burst uint32
	// Open is how many connections a client may have at a time; 0 is any number. Those from before the limit do not count. The
	// kernel looks up each of them for a new one.
	Open uint32
	// IPv4Bits and IPv6Bits are how many first bits of its address make a client; 0 stands for 32 and 64.
	IPv4Bits, IPv6Bits uint8
	// Drop drops what is too much. Otherwise it is refused.
	Drop bool
}

// The largest values of a ClientLimit.
const (
	maxRate, maxOpen             = 10_000, 1000
	maxIPv4Bits, maxIPv6Bits     = 32, 128
	usualIPv4Bits, usualIPv6Bits = 32, 64
)

// IsZero reports whether nothing is limited.
func (l ClientLimit) IsZero() bool { return l.PerSecond == 0 && l.Open == 0 }

// Bits is how many first bits of an address of a family make a client.
func (l ClientLimit) Bits(v6 bool) int {
	if v6 {
		return int(cmp.Or(l.IPv6Bits, usualIPv6Bits))
	}
	return int(cmp.Or(l.IPv4Bits, usualIPv4Bits))
}

// String is the text that ParseClientLimit parses, such as "rate=20,burst=40,open=100,ipv4=24,ipv6=56,drop"; empty for none.
func (l ClientLimit) String() string {
	if l.IsZero() {
		return ""
	}
	var parts []string
	for _, p := range l.parts() {
		if *p.number != 0 {
			parts = append(parts, p.name+"="+strconv.FormatUint(uint64(*p.number), 10))
		}
	}
	for _, b := range l.bits() {
		if *b.number != 0 {
			parts = append(parts, b.name+"="+strconv.Itoa(int(*b.number)))
		}
	}
	if l.Drop {
		parts = append(parts, dropWord)
	}
	return strings.Join(parts, ",")
}

const dropWord = "drop"

// part is a number of a ClientLimit, and its name in a text.
type part[T any] struct {
	name   string
	number *T
	most   uint64
}

func (l *ClientLimit) parts() []part[uint32] {
	return []part[uint32]{{"rate", &l.PerSecond, maxRate}, {"burst", &l.Burst, maxRate}, {"open", &l.Open, maxOpen}}
}

func (l *ClientLimit) bits() []part[uint8] {
	return []part[uint8]{{"ipv4", &l.IPv4Bits, maxIPv4Bits}, {"ipv6", &l.IPv6Bits, maxIPv6Bits}}
}

// longestLimit is longer than any text of a ClientLimit.
const longestLimit = 128

// ParseClientLimit parses numbers with names, separated by commas: rate (PerSecond), burst, open, ipv4 and ipv6 (bits), and
// the word drop. One of rate and open must be there.
func ParseClientLimit(text string) (l ClientLimit, err error) {
	if len(text) > longestLimit {
		return ClientLimit{}, fmt.Errorf("the limit has %d bytes: want %d at most", len(text), longestLimit)
	}
	seen := map[string]bool{}
	for one := range strings.SplitSeq(text, ",") {
		name, value, hasValue := strings.Cut(strings.TrimSpace(one), "=")
		if seen[name] {
			return ClientLimit{}, fmt.Errorf("%s is there twice", name)
		}
		seen[name] = true
		if name == dropWord && !hasValue {
			l.Drop = true
			continue
		}
		if err := l.set(name, value); err != nil {
			return ClientLimit{}, err
		}
	}
	if err := l.validate(); err != nil {
		return ClientLimit{}, err
	}
	return l, nil
}

// validate returns an error if a value is too large, or if nothing is limited.
func (l *ClientLimit) validate() error {
	for _, p := range l.parts() {
		if uint64(*p.number) > p.most {
			return fmt.Errorf("%s=%d: want %d at most", p.name, *p.number, p.most)
		}
	}
	for _, b := range l.bits() {
		if uint64(*b.number) > b.most {
			return fmt.Errorf("%s=%d: want %d at most", b.name, *b.number, b.most)
		}
	}
	switch {
	case l.IsZero():
		return errors.New("nothing is limited: want rate=N, open=N, or both")
	case l.Burst > 0 && l.PerSecond == 0:
		return errors.New("burst is of a rate: want rate=N too")
	}
	return nil
}

func (l *ClientLimit) set(name, value string) error {
	for _, p := range l.parts() {
		if p.name == name {
			n, err := parsePart(name, value, p.most)
			*p.number = uint32(n)
			return err
		}
	}
	for _, b := range l.bits() {
		if b.name == name {
			n, err := parsePart(name, value, b.most)
			*b.number = uint8(n)
			return err
		}
	}
	return fmt.Errorf("unknown %q: want rate=N, burst=N, open=N, ipv4=BITS, ipv6=BITS or drop", name)
}

func parsePart(name, value string, most uint64) (uint64, error) {
	n, err := strconv.ParseUint(value, 10, 64)
	if err != nil || n == 0 || n > most {
		return 0, fmt.Errorf("%s=%s: want a number from 1 to %d", name, value, most)
	}
	return n, nil
}
