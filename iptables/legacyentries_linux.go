package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// digests holds, for each chain of an instance, a hash of each rule without its counters;
// for a built-in chain, of the rules that jump to those chains.
type digests map[chainID][]uint64

// digest adds the chains of a table.
func (t *legacyTables) digest(table string, owned func(chain string) bool, into digests) (tableInfo, error) {
	info, blob, err := t.read(table)
	if err != nil || blob == nil {
		return info, err
	}
	layout := layoutOf(t.family)
	entries, begins, err := layout.parse(&info, blob)
	if err != nil {
		return info, fmt.Errorf("parse legacy table %s: %w", table, err)
	}
	var id chainID
	var isOurs, isBuiltIn bool
	for i := range entries {
		e := &entries[i]
		if chain, ok := begins[e.at]; ok {
			id, isOurs, isBuiltIn = chainID{table, chain}, owned(chain), slices.Contains(builtInChains, chain)
		}
		to := begins[e.to]
		isJump := isBuiltIn && owned(to)
		if !isOurs && !isJump {
			continue
		}
		t.hash.Reset()
		_, _ = t.hash.Write(blob[e.at:][:layout.match]) // never fails
		_, _ = t.hash.Write(blob[e.at+layout.matches : e.target])
		_, _ = t.hash.Write(e.action)
		_, _ = t.hash.WriteString(to)
		into[id] = append(into[id], t.hash.Sum64())
	}
	for _, chain := range begins { // the last entry of a chain is its end
		if id := (chainID{table, chain}); owned(chain) && len(into[id]) > 0 {
			into[id] = into[id][:len(into[id])-1]
		}
	}
	return info, nil
}

// entryLayout holds offsets in struct ipt_entry or ip6t_entry: of the end of the fields
// that match addresses, interfaces and protocol; of target_offset, which next_offset
// follows; and of the matches, after the counters.
type entryLayout struct{ match, offsets, matches int }

var (
	layoutIPv4 = entryLayout{84, 88, 112}   // read-only
	layoutIPv6 = entryLayout{136, 140, 168} // read-only
)

func layoutOf(family v1.IPFamily) entryLayout {
	if family == v1.IPv6Protocol {
		return layoutIPv6
	}
	return layoutIPv4
}

// entry is a rule, or the end of a chain.
type entry struct {
	at, target int
	// action is the target, except for a jump: it contains an offset, which changes with
	// every rule before it.
	action []byte
	to     int // where the chain begins that it jumps to, or nowhere
}

const nowhere = -1

// targetName is the name of the target, "" for a verdict or a jump.
func (e *entry) targetName() string {
	if e.action == nil {
		return ""
	}
	return unix.ByteSliceToString(e.action[targetName:][:xtExtensionMaxNameLen])
}

// Offsets in struct xt_entry_target, sizes of its name and of the name in an ERROR target
// (linux/netfilter/x_tables.h).
const (
	targetName            = 2
	targetRevision        = 31
	targetData            = 32
	xtExtensionMaxNameLen = 29
	xtFunctionMaxNameLen  = 30
	minTargetLen          = targetData + 4
)

var errMalformed = errors.New("malformed entry")

// parse returns the entries of a table, and the chain that begins at each offset. The
// offsets of built-in chains are in info; other chains follow an entry with the target
// ERROR, which holds the name.
func (l entryLayout) parse(info *tableInfo, blob []byte) (entries []entry, begins map[int]string, err error) {
	begins = map[int]string{}
	for hook, name := range builtInChains {
		if info.ValidHooks&(1<<hook) != 0 {
			begins[int(info.HookEntry[hook])] = name
		}
	}
	for at := 0; at < len(blob); {
		if at+l.matches > len(blob) {
			return nil, nil, errMalformed
		}
		target := at + int(binary.NativeEndian.Uint16(blob[at+l.offsets:]))
		end := at + int(binary.NativeEndian.Uint16(blob[at+l.offsets+2:]))
		if target < at+l.matches || target+minTargetLen > end || end > len(blob) {
			return nil, nil, errMalformed
		}
		data := blob[target+targetData : end]
		e := entry{at, target, blob[target:end], nowhere}
		name, _, _ := bytes.Cut(blob[target+targetName:][:xtExtensionMaxNameLen], []byte{0})
		switch string(name) { // which allocates nothing
		case "ERROR":
			begins[end] = unix.ByteSliceToString(data[:min(xtFunctionMaxNameLen, len(data))])
		case "": // the standard target: a verdict, or the offset to jump to
			if verdict := int(int32(binary.NativeEndian.Uint32(data))); verdict >= 0 {
				e.action = nil
				if verdict != end { // otherwise the rule only counts
					e.to = verdict
				}
			}
			fallthrough
		default:
			entries = append(entries, e)
		}
		at = end
	}
	return entries, begins, nil
}
