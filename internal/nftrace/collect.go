package nftrace

import (
	"net/netip"
	"slices"
	"strings"
)

// event is what the kernel tells about one step of a packet.
type event struct {
	MatchedRule

	id uint32 // of the packet
	// The rest is valid in the first event of each base chain.
	source, destination netip.AddrPort
	loopback            bool   // it leaves through a loopback interface
	state               string // of its connection; empty if the kernel does not tell it
}

// begins reports whether the event is the first of a base chain.
func (e *event) begins() bool { return e.destination.IsValid() }

// collector sorts events by packet. Only packets that a rule of its table has marked count,
// since other programs may trace too.
type collector struct {
	table   string
	limit   int
	packets []*packet
	current map[uint32]*packet // those that have not ended, by ID
}

// packet is a Packet that may not have ended.
type packet struct {
	TracedPacket

	id    uint32
	ended bool
	// base is the base chain that the packet passes; hook and priority are not known yet.
	base string
}

// Names of the chains of the trace's own table: the hook, and one of these.
const (
	suffixBegin = "-begin"
	suffixEnd   = "-end"
)

func newCollector(table string, limit int) *collector {
	return &collector{table: table, limit: limit, current: map[uint32]*packet{}}
}

// add takes over an event.
func (c *collector) add(e event) {
	own := e.Table == c.table
	marks := own && e.Handle != 0
	p := c.current[e.id]
	if p != nil && marks && p.has(hopOf(&e)) {
		p = nil // another packet with its ID: the kernel repeats IDs
	} else if p == nil && e.begins() {
		p = c.resumed(&e)
	}
	if p == nil && marks {
		p = c.start(&e)
	}
	if p == nil {
		return
	}
	switch {
	case own && e.begins():
		c.reach(p, &e)
	case !own:
		c.step(p, e)
	}
	if p.ended {
		delete(c.current, e.id)
	}
}

// start begins a packet, or returns nil beyond the limit.
func (c *collector) start(e *event) *packet {
	if len(c.packets) == c.limit {
		return nil
	}
	p := &packet{id: e.id}
	c.packets = append(c.packets, p)
	c.current[e.id] = p
	return p
}

// resumed returns the packet that left through a loopback interface and arrives again: the
// kernel gives it another ID.
func (c *collector) resumed(e *event) *packet {
	for _, p := range c.current {
		if last := p.last(); last != nil && last.Loopback && last.End && last.Source == e.source && last.Destination == e.destination {
			delete(c.current, p.id)
			p.id = e.id
			c.current[e.id] = p
			return p
		}
	}
	return nil
}

func (p *packet) last() *Hop {
	if len(p.Hops) == 0 {
		return nil
	}
	return &p.Hops[len(p.Hops)-1]
}

// hopOf returns where the packet is, by the name of a chain of the trace's own table.
func hopOf(e *event) Hop {
	hook, isEnd := strings.CutSuffix(e.Chain, suffixEnd)
	hop := Hop{Hook: strings.TrimSuffix(hook, suffixBegin), End: isEnd, Source: e.source, Destination: e.destination, Loopback: e.loopback}
	if isEnd { // connection tracking sees the packet after the begin
		hop.State = e.state
	}
	return hop
}

func (p *packet) has(hop Hop) bool { return slices.Contains(p.Hops, hop) }

// reach adds a Hop.
func (c *collector) reach(p *packet, e *event) {
	hop := hopOf(e)
	p.Hops = append(p.Hops, hop)
	p.ended = hop.End && (hop.Hook == "input" || hop.Hook == "postrouting" && !hop.Loopback)
}

// step adds a Step. Its Hook is the name of the base chain until it is resolved. The end of a
// chain is none.
func (c *collector) step(p *packet, e event) {
	if e.begins() {
		p.base = e.Chain
	}
	if e.Handle == 0 && !e.Policy {
		return
	}
	e.Hook = p.base
	p.Steps = append(p.Steps, e.MatchedRule)
	p.ended = e.Ends()
}

// done reports whether all packets up to the limit have ended.
func (c *collector) done() bool { return len(c.packets) == c.limit && len(c.current) == 0 }

// result returns the packets. Those that have not ended are lost.
func (c *collector) result() []TracedPacket {
	list := make([]TracedPacket, len(c.packets))
	for i, p := range c.packets {
		list[i] = p.TracedPacket
		list[i].Lost = !p.ended
	}
	return list
}
