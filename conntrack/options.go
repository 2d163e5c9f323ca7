package conntrack

import "github.com/serviceplane/serviceplane/desired"

// Options configure New. The zero value deletes stale UDP flows in the current
// network namespace.
type Options struct {
	// NetNS is the network namespace, as in proxier.Config.
	NetNS string
	// Table is the nf_tables table that exists while connections end, in each family. Empty
	// means "serviceplane.ending".
	Table string
	// SCTP also deletes stale SCTP associations, which outlive their endpoints while
	// heartbeats continue.
	SCTP bool
	// UnansweredTCP also deletes stale TCP connections in state SYN_SENT: a client repeats
	// its first packet for a minute or two. Then each sync that removes an endpoint reads all of
	// connection tracking. Without it, this is done only for FlowCheck.Untranslated: after the
	// first sync and after repairs. Established connections are
	// never deleted; those of ServicePorts with EndConnections are reset.
	UnansweredTCP bool
}

// tracks reports whether stale flows of a protocol are deleted.
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
