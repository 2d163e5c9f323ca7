package ebpf

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
)

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

// digest names what the programs of an object are with these settings and maps.
func digest(source string, addrLen int, settings any, used map[string]*ebpf.Map) (string, error) {
	_, content, err := object(source, addrLen)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	sum.Write(content)
	_, _ = fmt.Fprintf(sum, "%+v", settings) // a hash never fails
	for _, name := range slices.Sorted(maps.Keys(used)) {
		info, err := used[name].Info()
		if err != nil {
			return "", fmt.Errorf("read what map %s is: %w", name, err)
		}
		id, _ := info.ID()
		_ = binary.Write(sum, binary.NativeEndian, uint32(id))
	}
	return hex.EncodeToString(sum.Sum(nil)[:8]), nil
}
