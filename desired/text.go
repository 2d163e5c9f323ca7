package desired

import (
	"fmt"
	"slices"
)

// MarshalText is String.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// MarshalText is String.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// MarshalText is String.
func (s Scope) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalText is String.
func (a Action) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// MarshalText is String.
func (m Masquerading) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// MarshalText is String.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// MarshalText is String.
func (o Origin) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (o *Origin) UnmarshalText(text []byte) error {
	i := slices.Index(originNames, string(text))
	if i <= 0 {
		return fmt.Errorf("%w: origin %q: want outside, pod or node", ErrPacket, text)
	}
	*o = Origin(i)
	return nil
}

// UnmarshalText is the inverse of MarshalText.
func (p *Protocol) UnmarshalText(text []byte) error {
	for _, known := range []Protocol{TCP, UDP, SCTP} {
		if known.String() == string(text) {
			*p = known
			return nil
		}
	}
	return fmt.Errorf("%w: protocol %q: want TCP, UDP or SCTP", ErrPacket, text)
}
