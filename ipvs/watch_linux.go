package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// drainPeriod is how often Watch deletes drained real servers, checkPeriod how often it
// checks all virtual servers, because the kernel sends no notifications of them. It checks
// less often if that takes more than one part in checkShare of the time.
const (
	drainPeriod = time.Second
	checkPeriod = time.Second
	checkShare  = 20
)

// Watch is for proxier.Abilities: it reports damage to the rules and virtual servers, and
// changes of the node's addresses. It also deletes real servers that have drained.
func (e *engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	addresses, err := e.listen()
	if err != nil {
		return err
	}
	if e.addressesChanged() { // before listen
		damaged(proxier.Damage{Object: "addresses of the node"})
	}
	var running sync.WaitGroup
	var failed, failedRules error
	running.Go(func() {
		defer stop()
		failed = e.watchAddresses(ctx, addresses, damaged)
	})
	running.Go(func() {
		defer stop()
		failedRules = e.watchRules(ctx, damaged)
	})
	e.watchServers(ctx, damaged)
	running.Wait()
	return errors.Join(failed, failedRules)
}

// watchServers checks virtual servers, and deletes real servers that have drained, until ctx ends.
func (e *engine) watchServers(ctx context.Context, damaged func(proxier.Damage)) {
	tick, check := time.NewTicker(drainPeriod), time.NewTimer(checkPeriod)
	defer tick.Stop()
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			e.deleteOrRepair(ctx, damaged)
		case <-check.C:
			text, took := e.checkServers()
			if text != "" {
				damaged(proxier.Damage{Object: text})
			}
			check.Reset(max(checkPeriod, checkShare*took))
		}
	}
}

// listen receives changes of addresses. During a sync they wait in the socket's buffer, at first
// those of thousands of VIPs.
func (e *engine) listen() (*netlinkx.Conn, error) {
	const room = 16 << 20
	group := unix.RTNLGRP_IPV4_IFADDR
	if e.family == v1.IPv6Protocol {
		group = unix.RTNLGRP_IPV6_IFADDR
	}
	conn, err := netlinkx.Listen(e.config.NetNS, unix.NETLINK_ROUTE, room, group)
	if err != nil {
		return nil, fmt.Errorf("listen to changes of addresses: %w", netlinkx.Denied(err))
	}
	return conn, nil
}

// watchAddresses reports changes of addresses until ctx ends, and closes the socket.
func (e *engine) watchAddresses(ctx context.Context, conn *netlinkx.Conn, damaged func(proxier.Damage)) (err error) {
	defer func() { err = errors.Join(err, conn.Close()) }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		messages, err := conn.Receive(true)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, netlinkx.ErrLost):
			damaged(proxier.Damage{Object: "addresses of the node"})
		case err != nil:
			return fmt.Errorf("receive changes of addresses: %w", err)
		}
		for m := range netlinkx.Messages(messages) {
			if text, isDamage := e.isDamage(m.AddrChange()); isDamage {
				damaged(proxier.Damage{Object: text})
			}
		}
	}
}

// addressesChanged reports whether the node's addresses differ from those of the last sync.
// It ignores errors, which the next sync will return too.
func (e *engine) addressesChanged() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted {
		return false // the next update is full
	}
	here, elsewhere, err := e.device.addresses()
	return err == nil && (!maps.Equal(here, e.boundVIPs) || !slices.Equal(relevant(elsewhere), relevant(e.local)))
}

// isDamage reports whether an address of the node was added or deleted, or a VIP deleted
// by another program.
func (e *engine) isDamage(change netlinkx.AddrChange) (text string, isDamage bool) {
	addr := change.Addr
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || !addr.IsValid() || addr.Is4() != (e.family == v1.IPv4Protocol) || isLocalOnly(addr) {
		return "", false
	}
	if e.device.isOn(change.Link) {
		return fmt.Sprintf("address %v of device %s", addr, e.config.Names.Device), !change.New && e.boundVIPs[addr]
	}
	return fmt.Sprintf("address %v of the node", addr), change.New != slices.Contains(e.local, addr)
}

// checkServers returns which virtual server another program has changed, once until the
// next full sync, and how long the check took, without waiting for a sync.
func (e *engine) checkServers() (text string, took time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || e.reported {
		return "", 0 // the next update is full
	}
	began := time.Now()
	text, err := e.table.findDamage()
	if err != nil {
		e.log.Warn("virtual servers are not compared with the kernel, will be retried", zap.Error(err))
	}
	e.reported = text != ""
	return text, time.Since(began)
}

// deleteOrRepair deletes real servers that have drained, or requests a full sync.
func (e *engine) deleteOrRepair(ctx context.Context, damaged func(proxier.Damage)) {
	if err := e.deleteDrained(ctx); err != nil {
		e.log.Warn("drained real servers are not deleted: a full sync follows", zap.Error(err))
		damaged(proxier.Damage{})
	}
}

// deleteDrained deletes real servers that have drained. After an error the state of the kernel
// is unknown: the next update must be full.
func (e *engine) deleteDrained(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || len(e.table.draining) == 0 {
		return nil
	}
	err := errors.Join(e.table.deleteDrained(), e.unbind(), e.release(ctx, nil))
	e.trusted = err == nil
	return err
}

// watchRules watches the rules and the firewall, until one of them ends.
func (e *engine) watchRules(ctx context.Context, damaged func(proxier.Damage)) error {
	watches := []func(context.Context, func(proxier.Damage)) error{e.rules.Watch}
	if e.firewall != nil {
		if watch := e.firewall.engine.Abilities().Watch; watch != nil {
			watches = append(watches, watch)
		}
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(watches))
	var running sync.WaitGroup
	for i, watch := range watches {
		running.Go(func() {
			defer stop()
			errs[i] = watch(ctx, damaged)
		})
	}
	running.Wait()
	return errors.Join(errs...)
}
