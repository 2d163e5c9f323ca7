package proxier

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// foreignLockError means that a process holds the lock that may not program anything.
type foreignLockError struct{ error }

// ownedName is a name that no two instances may share.
type ownedName struct{ kind, name string }

// owned returns the names that no two instances may share. Each engine writes objects with
// some of them only, but a program cleans up the objects of all its modes.
func (n Names) owned() []ownedName {
	// The nf_tables table of ipvs mode exists beside that of nftables mode.
	return []ownedName{{"table", strings.TrimSuffix(n.Table, ".ipvs")}, {"chains", n.ChainPrefix}, {"device", n.Device}}
}

func inUseError(n ownedName, family v1.IPFamily, holder string) error {
	return fmt.Errorf("%w: %s %s of %s is programmed by %s: stop it, or give one of the two names of its own (Config.Names; --instance of nodeproxy)",
		ErrInUse, n.kind, n.name, family, holder)
}
