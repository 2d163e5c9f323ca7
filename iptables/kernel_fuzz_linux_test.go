package iptables

import (
	"encoding/binary"
	"strings"
	"testing"
)

// legacyEntry builds an entry with a target: its name, and four bytes of data.
func legacyEntry(l entryLayout, target string, data uint32) []byte {
	end := l.matches + minTargetLen + xtFunctionMaxNameLen
	b := make([]byte, end)
	binary.NativeEndian.PutUint16(b[l.offsets:], uint16(l.matches))
	binary.NativeEndian.PutUint16(b[l.offsets+2:], uint16(end))
	copy(b[l.matches+targetName:], target)
	binary.NativeEndian.PutUint32(b[l.matches+targetData:], data)
	return b
}

// FuzzLegacyEntries: each entry lies within the table, after the one before.
func FuzzLegacyEntries(f *testing.F) {
	for _, l := range []entryLayout{layoutIPv4, layoutIPv6} {
		jump := legacyEntry(l, "", 0)
		f.Add(append(append(jump, legacyEntry(l, "ERROR", 0x41414141)...), legacyEntry(l, "MASQUERADE", 1)...), uint32(0x1f), uint32(0))
		f.Add(legacyEntry(l, "", ^uint32(0)), uint32(1), uint32(1<<31))
	}
	f.Fuzz(func(t *testing.T, blob []byte, hooks, at uint32) {
		info := tableInfo{ValidHooks: hooks}
		info.HookEntry[1] = at
		for _, l := range []entryLayout{layoutIPv4, layoutIPv6} {
			entries, begins, err := l.parse(&info, blob)
			if err != nil {
				continue
			}
			end := 0
			for _, e := range entries {
				if e.at < end || e.target < e.at+l.matches || e.target+minTargetLen > len(blob) || e.to < nowhere {
					t.Errorf("entry at %d, target at %d, to %d, in %d bytes; the one before ends at %d", e.at, e.target, e.to, len(blob), end)
				}
				end = e.target + minTargetLen
			}
			for _, name := range begins {
				if strings.Contains(name, "\x00") {
					t.Errorf("chain %q", name)
				}
			}
		}
	})
}

// FuzzVersion: a version that was read is read again from what such a program prints.
func FuzzVersion(f *testing.F) {
	f.Add("iptables v1.8.9 (nf_tables)\n")
	f.Add("ip6tables v1.4.21")
	f.Add("iptables v1.8.10-rc1")
	f.Fuzz(func(t *testing.T, text string) {
		version, variant, err := parseVersion(text)
		if err != nil {
			return
		}
		printed := "iptables v" + version.String() + map[Variant]string{VariantNFT: " (nf_tables)"}[variant]
		again, same, err := parseVersion(printed)
		if err != nil || again != version || same != variant {
			t.Errorf("%q is version %v, %s; %q is %v, %s, %v", text, version, variant, printed, again, same, err)
		}
	})
}
