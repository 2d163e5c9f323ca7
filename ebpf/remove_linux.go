package ebpf

import (
	"errors"

	"go.uber.org/zap"
)

// RemoveSockets detaches the programs of an instance, those of Forward too, and removes what it has pinned,
// in all IP families of the config. The table of the rules stays: it is for a node that goes on with the engine of
// package nftables under the same Names. TCP sockets that are open go on, but getpeername(2) then
// returns their endpoint. Connected UDP sockets end: see UDPTranslate. Only Config.Names, Config.NetNS,
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
