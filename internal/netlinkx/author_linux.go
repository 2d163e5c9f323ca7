package netlinkx

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Author names the process that committed a transaction of nf_tables, from the attributes
// of NFT_MSG_NEWGEN, the last notification of a transaction.
func Author(attrs []byte) string {
	program, process := String(Find(attrs, unix.NFTA_GEN_PROC_NAME)), Uint32(Find(attrs, unix.NFTA_GEN_PROC_PID))
	if process == 0 {
		return program
	}
	return fmt.Sprintf("%s (process %d)", program, process)
}
