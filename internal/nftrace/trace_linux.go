package nftrace

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
)

const (
	// traceGroup is NFNLGRP_NFTRACE of linux/netfilter/nfnetlink.h.
	traceGroup = 9
	// silenceTime is for how long a packet may be silent before it counts as lost, and for how
	// long an answer may take after the packet has left.
	silenceTime = time.Second
	// drainTime is for how long events are read after Options.While has returned.
	drainTime = 100 * time.Millisecond
	// bufferBytes is room for the events of MaxLimit packets that pass some 10 rules each.
	bufferBytes = 4 << 20
	tablePrefix = "serviceplane-trace-"
)

// Trace follows packets until Options.Limit of them have ended, or until the Timeout or ctx
// ends, which is no error. Several may run at once, in several programs. An error wraps
// ErrOptions if the options are invalid, and os.ErrPermission without CAP_NET_ADMIN.
func Trace(ctx context.Context, o Options) (TraceResult, error) {
	if err := o.Validate(); err != nil {
		return TraceResult{}, err
	}
	r, err := trace(ctx, o.withDefaults(), flagOwner)
	if err != nil {
		return TraceResult{}, fmt.Errorf("trace packets: %w", err)
	}
	return r, nil
}

func trace(ctx context.Context, o Options, flags uint32) (r TraceResult, err error) {
	ctx, stop := context.WithTimeout(ctx, o.Timeout)
	defer stop()
	if o.Send {
		s, err := newSender(o.SendFrom, o.Packet)
		if err != nil {
			return r, err
		}
		defer s.close()
		o.Matches[0].Source = netip.AddrPortFrom(o.Packet.Source, s.port)
		o.While = func(ctx context.Context) error {
			err := s.send(ctx)
			r.Sent = outcome(err)
			return err
		}
	}
	t := newTable(&o)
	session, err := open(&o, t, flags)
	if err != nil {
		return r, err
	}
	defer session.close()
	c := newCollector(t.name, o.Limit)
	if err := session.follow(ctx, c, o.While); err != nil {
		return r, err
	}
	r.Packets = c.result()
	session.resolve(r.Packets)
	r.LegacyTables, err = legacyTables(o.NetNS, t.family)
	return r, err
}

func newTable(o *Options) *table {
	t := &table{name: tablePrefix + rand.Text(), family: unix.NFPROTO_IPV6, limit: o.Limit, matches: o.Matches}
	t.bits = o.Matches[0].bits()
	if t.bits == netip.IPv4Unspecified().BitLen() {
		t.family = unix.NFPROTO_IPV4
	}
	return t
}

// session holds the sockets of a trace.
type session struct {
	netNS    string
	table    *table
	listener *netlinkx.Conn // of events
	owner    *nft.Conn      // of the table
	lock     int            // tells others that the table is in use
	deletes  bool           // the table is there
}

// open creates the table.
func open(o *Options, t *table, flags uint32) (s *session, err error) {
	s = &session{netNS: o.NetNS, table: t, lock: -1}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.owner, err = nft.Dial(o.NetNS); err != nil {
		return s, err
	}
	err = namespace.Visit(o.NetNS, func() (err error) { // which has the locks
		if s.lock, err = lock(t.name); err != nil {
			return fmt.Errorf("lock table %s: %w", t.name, err)
		}
		return s.deleteLeftovers()
	})
	if err != nil {
		return s, err
	}
	if s.listener, err = netlinkx.Listen(o.NetNS, unix.NETLINK_NETFILTER, bufferBytes, traceGroup); err != nil {
		return s, fmt.Errorf("listen to traces: %w", err)
	}
	err = t.install(s.owner, flags)
	if flags != 0 && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) { // before Linux 5.12
		err = t.install(s.owner, 0)
	}
	s.deletes = err == nil
	return s, err
}

// close deletes the table. Where the kernel does that when the socket is closed, it may come late: a program
// that another goroutine starts has a copy of the socket for a moment.
func (s *session) close() {
	if s.deletes {
		_ = s.table.transact(s.owner, (*nft.Batch).DeleteTable)
	}
	if s.listener != nil {
		_ = s.listener.Close()
	}
	if s.owner != nil {
		_ = s.owner.Close()
	}
	if s.lock >= 0 {
		_ = unix.Close(s.lock)
	}
}

// lock holds an abstract unix socket of the network namespace: it fails while another program
// holds it, and ends with the program.
func lock(name string) (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + name}); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// follow reads events until the trace ends. It returns after while has returned.
func (s *session) follow(ctx context.Context, c *collector, while func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	f := following{collector: c, events: make(chan event), failed: make(chan error, 1), silence: time.NewTimer(silenceTime)}
	if while != nil {
		f.running = make(chan struct{})
		go func() {
			defer close(f.running)
			_ = while(ctx)
		}()
	}
	returned := f.running
	go func() { f.failed <- s.read(f.events) }()
	err := f.run(ctx)
	stop()
	if returned != nil {
		<-returned
	}
	_ = s.listener.SetReadDeadline(time.Unix(1, 0))
	for e := range f.events {
		f.add(e)
	}
	if err == nil {
		err = <-f.failed
	}
	// On a busy machine the socket may still have all.
	rest := s.receive(false, f.add)
	return errors.Join(err, rest)
}

// read sends events until the deadline of the socket, or until reading fails.
func (s *session) read(events chan<- event) error {
	defer close(events)
	return s.receive(true, func(e event) { events <- e })
}

// receive calls each for the events that are there, or until the deadline of the socket.
func (s *session) receive(wait bool, each func(event)) error {
	for {
		messages, err := s.listener.Receive(wait)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return fmt.Errorf("read events: %w: trace fewer packets", err)
		}
		for m := range netlinkx.Messages(messages) {
			if e, ok := parse(m); ok {
				each(e)
			}
		}
	}
}

// following decides when a trace ends.
type following struct {
	*collector

	events  chan event
	failed  chan error
	running chan struct{} // closed when Options.While has returned; nil if it is not running
	silence *time.Timer   // no event came for some time
}

// run returns an error only if reading fails.
func (f *following) run(ctx context.Context) error {
	ended, last := ctx.Done(), false // last means that no more packets are wanted
	for !f.done() || f.running != nil && !f.stopped() {
		select {
		case e, reading := <-f.events:
			if !reading {
				return <-f.failed
			}
			f.add(e)
			f.silence.Reset(silenceTime)
		case <-f.running:
			f.running, last = nil, true
			f.silence.Reset(drainTime)
		case <-ended:
			ended, last = nil, true
			f.silence.Reset(drainTime)
		case <-f.silence.C:
			if last && f.running == nil || ended == nil || len(f.packets) == f.limit {
				return nil
			}
		}
	}
	return nil
}

// stopped reports whether a rule or a policy stopped every packet: no answer will come.
func (f *following) stopped() bool {
	for _, p := range f.packets {
		if n := len(p.Steps); n == 0 || !p.Steps[n-1].Ends() {
			return false
		}
	}
	return true
}
