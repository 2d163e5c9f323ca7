package ebpf

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/serviceplane/serviceplane/internal/bpfx"
)

//go:generate ../hack/ebpf.sh

// objects are the compiled programs in bpf/, one for each IP family: see hack/ebpf.sh.
//
//go:embed *.o
var objects embed.FS

// object returns the compiled programs of a source in bpf/ for addresses of a length.
func object(source string, addrLen int) (name string, content []byte, err error) {
	name = source + map[int]string{4: "4.o", 16: "6.o"}[addrLen]
	if content, err = objects.ReadFile(name); err != nil {
		return "", nil, fmt.Errorf("read object: %w", err)
	}
	return name, content, nil
}

// loadable returns an error on a machine for which there are no programs.
func loadable(order binary.ByteOrder) error {
	if order.Uint16([]byte{1, 0}) != 1 {
		return fmt.Errorf("%w: the programs are for little-endian machines: choose mode nftables", errUnavailable)
	}
	return nil
}

// loadObject returns the programs and maps of an object, on a little-endian machine: others have rules alone.
func loadObject(source string, addrLen int) (*ebpf.CollectionSpec, error) {
	if err := loadable(binary.NativeEndian); err != nil {
		return nil, err
	}
	name, content, err := object(source, addrLen)
	if err != nil {
		return nil, err
	}
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(content))
	if err != nil {
		return nil, fmt.Errorf("load object %s: %w", name, err)
	}
	return spec, nil
}

// settings are the variables of the programs of an object, by their names there.
type settings map[string]any

// loadPrograms loads what an object has, with these settings and maps.
func loadPrograms(objects *ebpf.CollectionSpec, set settings, options ebpf.CollectionOptions) (*ebpf.Collection, error) {
	for name, value := range set {
		if err := objects.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s of the programs: %w", name, err)
		}
	}
	return ebpf.NewCollectionWithOptions(objects, options)
}

// mapSet has maps by their names in a source.
type mapSet map[string]*ebpf.Map

func (s mapSet) close() error {
	var errs []error
	for _, m := range s {
		errs = append(errs, bpfx.Close(m))
	}
	return errors.Join(errs...)
}

// idOf returns the number of a map.
func idOf(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("read what map %v is: %w", m, err)
	}
	id, _ := info.ID()
	return id, nil
}

// sumCounts adds the counters of all processors to variables, in the order of the source.
func sumCounts(counts *ebpf.Map, to ...*uint64) error {
	for what, sum := range to {
		var perCPU []uint64
		if err := counts.Lookup(uint32(what), &perCPU); err != nil {
			return fmt.Errorf("read the counts of the programs: %w", err)
		}
		for _, n := range perCPU {
			*sum += n
		}
	}
	return nil
}

// digest names what the programs of an object are with these settings and maps.
func digest(source string, addrLen int, set settings, used mapSet) (string, error) {
	_, content, err := object(source, addrLen)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	sum.Write(content)
	_, _ = fmt.Fprint(sum, set) // in the order of the names; a hash never fails
	for _, name := range slices.Sorted(maps.Keys(used)) {
		id, err := idOf(used[name])
		if err != nil {
			return "", err
		}
		_ = binary.Write(sum, binary.NativeEndian, uint32(id))
	}
	return hex.EncodeToString(sum.Sum(nil)[:8]), nil
}
