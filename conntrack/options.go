package conntrack

import "github.com/serviceplane/serviceplane/desired"

// Options configure a Cleaner. The zero value looks after UDP in the current
// network namespace.
type Options struct {
	// NetNS is the network namespace, as in proxier.Config.
	NetNS string
	// SCTP looks after SCTP associations too, which outlive their endpoints for as
	// long as heartbeats last.
	SCTP bool
	// UnansweredTCP looks after TCP connections that were begun and not answered
	// yet: a client repeats its first packet for a minute or two. Established
	// connections are never touched.
	UnansweredTCP bool
}

// tracks says whether flows of a protocol are looked after.
func (o Options) tracks(p desired.Protocol) bool {
	switch p {
	case desired.UDP:
		return true
	case desired.SCTP:
		return o.SCTP
	case desired.TCP:
		return o.UnansweredTCP
	default:
		return false
	}
}
