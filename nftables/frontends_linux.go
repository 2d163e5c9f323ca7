package nftables

import (
	"context"
	"encoding/binary"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// Frontends reads which frontends the table in the kernel has, in no order: before the
// first Apply, those of a predecessor.
func (e *Engine) Frontends(ctx context.Context) ([]desired.Key, error) {
	if err := e.connect(); err != nil {
		return nil, err
	}
	o, err := e.observe(ctx)
	if err != nil || o == nil {
		return nil, err
	}
	l := e.layoutFor(&desired.Globals{})
	if !o.isOurs(&l) {
		return nil, nil
	}
	var keys []desired.Key
	for _, id := range []setID{setServices, setNodePorts} {
		if _, there := o.sets[e.specs[id].name]; !there {
			continue
		}
		if err := e.observeSet(ctx, o, &e.specs[id]); err != nil {
			return nil, err
		}
		for text := range o.element[id] {
			keys = append(keys, parseFrontendKey([]byte(text)))
		}
	}
	return keys, nil
}

// parseFrontendKey is the inverse of frontendKey.
func parseFrontendKey(b []byte) (k desired.Key) {
	const protoAndPort = 8
	if n := len(b) - protoAndPort; n > 0 {
		k.VIP, _ = netip.AddrFromSlice(b[:n])
		b = b[n:]
	}
	k.Protocol, k.Port = desired.Protocol(b[0]), binary.BigEndian.Uint16(b[4:])
	return k
}
