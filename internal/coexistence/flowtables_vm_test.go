//go:build vm

package coexistence

import "testing"

// TestBesideFlowtables is TestBeside for programs with flowtables, which few kernels of containers have.
func TestBesideFlowtables(t *testing.T) {
	table := readTable(t)
	for _, f := range corpus() {
		if !f.flowtable {
			continue
		}
		for _, e := range engines() {
			t.Run(f.name+"/"+e.name, func(t *testing.T) { newWorld(t, f, e).play(table) })
		}
	}
}
