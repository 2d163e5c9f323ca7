package nftables

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// The flowtable has the node's devices. They come and go with pods, without any update: so they
// have transactions of their own, which no update waits for, and of which none fails an update.

// Attributes of linux/netfilter/nf_tables.h that package unix does not have.
const (
	flowtableHook    = 3 // NFTA_FLOWTABLE_HOOK
	hookNumber       = 1 // NFTA_FLOWTABLE_HOOK_NUM
	hookPriority     = 2 // NFTA_FLOWTABLE_HOOK_PRIORITY
	hookDevices      = 3 // NFTA_FLOWTABLE_HOOK_DEVS
	deviceName       = 1 // NFTA_DEVICE_NAME
	devicesOfMessage = 128
)

// newFlowtable creates the flowtable without devices.
func (w *wire) newFlowtable() { w.flowtable(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, "add", nil) }

func (w *wire) flowtable(typ, flags uint16, op string, devices []string) {
	want := wantedFlowtable()
	w.Start(typ, flags, op, "flowtable "+want.name)
	w.Text(nft.FlowtableTable, w.Table)
	w.Text(nft.FlowtableName, want.name)
	w.Nest(flowtableHook, func() {
		w.Uint32(hookNumber, want.hook)
		w.Uint32(hookPriority, uint32(want.priority))
		if len(devices) > 0 {
			w.Nest(hookDevices, func() {
				for _, d := range devices {
					w.Text(deviceName, d)
				}
			})
		}
	})
	if typ == unix.NFT_MSG_NEWFLOWTABLE {
		w.Uint32(nft.FlowtableFlags, want.flags)
	}
	w.End()
}

func (w *wire) deleteFlowtable(name string) {
	w.Start(unix.NFT_MSG_DELFLOWTABLE, 0, "delete", "flowtable "+name)
	w.Text(nft.FlowtableTable, w.Table)
	w.Text(nft.FlowtableName, name)
	w.End()
}

// removeFlowtables deletes the flowtables that no rule of ours uses.
func (r *repair) removeFlowtables(w *wire) {
	for name := range r.observed.flows {
		if name != flowtableOfOurs || r.state.layout.rules.fastAfter == 0 {
			w.deleteFlowtable(name)
		}
	}
}

// listFlowtables reads the flowtables of the table. The socket of every caller has received something: see
// nft.Batch.ListFlowtables.
func (e *Engine) listFlowtables(ctx context.Context, k kernel) (flows map[string]flowtable, err error) {
	w := newWire(e.batch.Family, e.config.Names.Table)
	w.ListFlowtables()
	err = k.Dump(ctx, &w.Batch, func() { flows = map[string]flowtable{} }, func(attrs []byte) {
		if netlinkx.String(netlinkx.Find(attrs, nft.FlowtableTable)) == e.config.Names.Table {
			f := parseFlowtable(attrs)
			flows[f.name] = f
		}
	})
	return flows, err
}

func parseFlowtable(attrs []byte) flowtable {
	f := flowtable{
		name:     netlinkx.String(netlinkx.Find(attrs, nft.FlowtableName)),
		hook:     netlinkx.Uint32(netlinkx.Find(attrs, flowtableHook, hookNumber)),
		priority: int32(netlinkx.Uint32(netlinkx.Find(attrs, flowtableHook, hookPriority))),
		flags:    netlinkx.Uint32(netlinkx.Find(attrs, nft.FlowtableFlags)),
	}
	for _, name := range netlinkx.Attributes(netlinkx.Find(attrs, flowtableHook, hookDevices)) {
		f.devices = append(f.devices, netlinkx.String(name))
	}
	slices.Sort(f.devices)
	return f
}

// wantedDevices lists the node's devices that belong to the fast path, sorted.
func (e *Engine) wantedDevices() ([]string, error) {
	s, err := netlinkx.Open(e.config.NetNS)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	devices, err := s.Devices()
	devices = slices.DeleteFunc(devices, func(name string) bool {
		return e.config.FastPathDevice != nil && !e.config.FastPathDevice(name)
	})
	slices.Sort(devices)
	return devices, err
}

const (
	deviceAttempts = 5
	devicePause    = 20 * time.Millisecond
)

// followDevices gives the flowtable the devices that it lacks, and takes others away. A device may
// go meanwhile, then it starts again. Without flowtable it does nothing.
func (e *Engine) followDevices(ctx context.Context, k kernel) error {
	var err error
	for range deviceAttempts {
		if err = e.followDevicesOnce(ctx, k); !errors.Is(err, unix.ENOENT) || !pause.For(ctx, devicePause) {
			break
		}
	}
	return err
}

func (e *Engine) followDevicesOnce(ctx context.Context, k kernel) error {
	added, gone, err := e.compareDevices(ctx, k)
	if err != nil || len(added)+len(gone) == 0 {
		return err
	}
	w := newWire(e.batch.Family, e.config.Names.Table)
	w.Begin()
	for devices := range slices.Chunk(gone, devicesOfMessage) {
		w.flowtable(unix.NFT_MSG_DELFLOWTABLE, 0, "delete devices of", devices)
	}
	for devices := range slices.Chunk(added, devicesOfMessage) {
		w.flowtable(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, "add devices to", devices)
	}
	w.Finish()
	return e.listeners.transaction(func() error { return k.Commit(ctx, &w.Batch) })
}

// compareDevices compares the flowtable in the kernel with the node's devices.
func (e *Engine) compareDevices(ctx context.Context, k kernel) (missing, unexpected []string, err error) {
	flows, err := e.listFlowtables(ctx, k)
	have, ok := flows[flowtableOfOurs]
	if err != nil || !ok {
		return nil, nil, err
	}
	want, err := e.wantedDevices()
	if err != nil {
		return nil, nil, err
	}
	without := func(list, others []string) []string {
		return slices.DeleteFunc(slices.Clone(list), func(d string) bool { return slices.Contains(others, d) })
	}
	return without(want, have.devices), without(have.devices, want), nil
}

// syncDevices is followDevices in a full update, which does not fail with it.
func (e *Engine) syncDevices(ctx context.Context) {
	if e.fastAfter() == 0 {
		return
	}
	if err := e.followDevices(ctx, e.kernel); err != nil {
		e.log.Warn("devices of the fast path are not up to date: connections through others are as slow as without it", zap.Error(err))
	}
}

// watchLinks follows the node's devices until ctx ends.
func (e *Engine) watchLinks(ctx context.Context) (err error) {
	k, err := e.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.Close()) }()
	if err := e.listeners.writesFrom(writer{engine: e, devices: true}, k.Port()); err != nil {
		return err
	}
	if _, err := e.generationFrom(ctx, k); err != nil { // see listFlowtables
		return err
	}
	return netlinkx.WatchLinks(ctx, e.config.NetNS, func() error { return e.followDevices(ctx, k) })
}

// verifyFlowtables compares the flowtables. Devices come and go, so it looks again before it
// reports one. A check leaves the devices to watchLinks.
func (e *Engine) verifyFlowtables(ctx context.Context, v *verification) error {
	want := map[string]flowtable{}
	if v.layout.rules.fastAfter > 0 {
		want[flowtableOfOurs] = wantedFlowtable()
	}
	for name, f := range v.have.flows {
		if _, ok := want[name]; !ok {
			v.compare("flowtable "+name+v.where, "", f.shape())
		}
	}
	ours, ok := want[flowtableOfOurs]
	if !ok {
		return nil
	}
	have, exists := v.have.flows[flowtableOfOurs]
	v.compare("flowtable "+flowtableOfOurs+v.where, ours.shape(), either(exists, have.shape(), ""))
	if v.written != nil {
		return nil
	}
	var missing, unexpected []string
	for range deviceAttempts {
		var err error
		missing, unexpected, err = e.compareDevices(ctx, e.kernel)
		if err != nil {
			return err
		}
		if len(missing)+len(unexpected) == 0 || !pause.For(ctx, devicePause) {
			break
		}
	}
	for problem, devices := range map[string][]string{proxier.DifferenceMissing: missing, proxier.DifferenceUnexpected: unexpected} {
		for _, d := range devices {
			v.differs(proxier.Difference{Object: "device " + d + " of flowtable " + flowtableOfOurs + v.where, Problem: problem})
		}
	}
	return nil
}
