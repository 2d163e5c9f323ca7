package iptables

import (
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
)

// plan returns the input of iptables-restore that programs an update from scratch.
func plan(c *Config, family v1.IPFamily, update *desired.Update) string {
	m := newModel(c, family, update.Globals)
	m.plan(update)
	want := m.allChains()
	changes := map[string]*change{}
	for _, table := range []string{tableNAT, tableFilter} {
		changes[table] = changeOf(nil, want[table], false)
		_, changes[table].first.inserts = repairJumps(table, m.jumps(), nil)
	}
	return compose(changes[tableNAT], changes[tableFilter]).b.String()
}
