package ebpf

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/bpfx"
)

// Cleanup implements proxier.Engine: it detaches the programs, removes what is pinned, and deletes the
// table of the rules. TCP sockets that are open go on; connected UDP sockets end.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.forward.cleanup(), e.removeSockets(), e.rules.Cleanup(ctx))
}

func (e *Engine) removeSockets() error {
	if e.programs != nil { // their pins may be out of reach
		if err := e.programs.endLinks(); err != nil {
			return err
		}
	}
	if err := e.closeSockets(); err != nil {
		return err
	}
	p := e.closedPrograms()
	if _, err := os.Stat(filepath.Dir(p.dir)); errors.Is(err, fs.ErrNotExist) { // not p.dir: a process may have died after it was removed
		e.config.removeEmpty(filepath.Dir(p.dir))
		return nil
	}
	err := p.open(filepath.Dir(p.dir))
	if err == nil {
		err = e.detach(p)
	}
	return errors.Join(err, p.close())
}

// RemoveSockets detaches the programs of an instance, those of the fast path too, and removes what it has pinned,
// in all IP families of the config. The table of the rules stays: it is for a node that goes on with the engine of
// package nftables under the same Names. TCP sockets that are open go on, but getpeername(2) then
// returns their endpoint. Connected UDP sockets end: see Sockets.UDP. Only Config.Names, Config.NetNS,
// Config.Families, Sockets.BPFFS and Sockets.NetNSs count. It is no error if nothing is there. If a process uses it, the error is proxier.ErrInUse.
func RemoveSockets(config Config) error {
	config = config.WithDefaults()
	var errs []error
	for _, family := range config.Families {
		e := &Engine{config: config, family: family, log: zap.NewNop()}
		errs = append(errs, newForwarder(config, family, zap.NewNop()).cleanup(), e.removeSockets())
	}
	return errors.Join(errs...)
}

// detach removes everything, and ends the UDP sockets that nobody follows then.
func (e *Engine) detach(p *programs) error {
	if !p.haveUDP() {
		return p.remove()
	}
	objects, err := spec(e.family)
	if err != nil {
		return err
	}
	sockets := compatible(filepath.Join(p.dir, mapDatagrams), objects.Maps[mapDatagrams])
	if err := p.remove(); err != nil || sockets == nil {
		return err
	}
	err = newDatagrams(&e.config, e.family, e.log).endAll(sockets)
	return errors.Join(err, bpfx.Close(sockets))
}
