package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// Messages and attributes of linux/netfilter/nfnetlink_acct.h.
const (
	acctNew = 0
	acctGet = 1
	acctDel = 3

	acctName    = 1
	acctPackets = 2
)

// acct creates, reads and deletes accounting objects in a network namespace, as in
// namespace.Visit. It needs a kernel with nfnetlink_acct.
type acct struct{ netNS string }

// execute sends a message about an object, and returns the answers.
func (a acct) execute(message uint16, name string, flags uint16) (answers []netlinkx.Message, err error) {
	conn, err := netlinkx.Dial(a.netNS, unix.NETLINK_NETFILTER, answerRoom)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	attrs := nl.NewRtAttr(acctName, nl.ZeroTerminated(name)).Serialize()
	return conn.AskAll(netlinkx.Request(unix.NFNL_SUBSYS_ACCT<<8|message, flags, unix.AF_UNSPEC, attrs...))
}

// ensure creates the object with count 0, unless it exists.
func (a acct) ensure(name string) error {
	_, err := a.execute(acctNew, name, unix.NLM_F_CREATE|unix.NLM_F_ACK)
	if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) { // EBUSY: a newer kernel, for an object in use
		return fmt.Errorf("create counter %s: %w", name, err)
	}
	return nil
}

// remove deletes the object, unless it is gone or the rules of the other IP family use it.
func (a acct) remove(name string) error {
	_, err := a.execute(acctDel, name, unix.NLM_F_ACK)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) && !isWithoutAcct(err) {
		return fmt.Errorf("delete counter %s: %w", name, err)
	}
	return nil
}

// isWithoutAcct reports whether an error means that the kernel has no nfnetlink_acct.
func isWithoutAcct(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// packets returns the count of the object. It lists all objects, because the kernel marks
// the answer about a single one as the first of several, and sends no end.
func (a acct) packets(name string) (count uint64, err error) {
	answers, err := a.execute(acctGet, name, unix.NLM_F_DUMP)
	if err != nil {
		return 0, err
	}
	for _, m := range answers {
		_, attrs := m.Netfilter()
		if packets := netlinkx.Find(attrs, acctPackets); netlinkx.String(netlinkx.Find(attrs, acctName)) == name && len(packets) == 8 {
			return binary.BigEndian.Uint64(packets), nil
		}
	}
	return 0, fmt.Errorf("read counter %s: %w", name, unix.ENOENT)
}

func (c *Counters) read(name string) (uint64, bool) {
	packets, err := acct{c.netNS}.packets(name)
	return packets, err == nil
}

// nfacctKernel is implemented by kernels that know whether rules can count by nfacct.
type nfacctKernel interface {
	counts(ctx context.Context, counter string) error
}

// counts tries a rule with a counter, which must exist.
func (t *tool) counts(ctx context.Context, counter string) error {
	for _, table := range []string{tableFilter, tableNAT} {
		if err := t.tryFeatures(ctx, table, []feature{{rule: "-m nfacct --nfacct-name " + counter}}); err != nil {
			return err
		}
	}
	return nil
}

// ensureCounters makes the counters of the rules if the kernel and the programs can count.
// It returns false if they cannot: the rules work without.
func (e *engine) ensureCounters(ctx context.Context, k kernel) bool {
	c, ok := k.(nfacctKernel)
	if !ok || e.config.HealthChecksOnly {
		return false
	}
	names := e.config.chains()
	err := errors.Join(acct{e.config.NetNS}.ensure(names.localhostCounter()), acct{e.config.NetNS}.ensure(names.invalidCounter()))
	if err == nil {
		err = c.counts(ctx, names.localhostCounter())
	}
	if err != nil {
		e.log.Debug("packets are not counted: nfacct does not work", zap.Error(err))
	}
	return err == nil
}

// removeCounters deletes the counters, which no rule of this family uses any more.
func (e *engine) removeCounters() error {
	if e.config.HealthChecksOnly {
		return nil
	}
	names := e.config.chains()
	return errors.Join(acct{e.config.NetNS}.remove(names.localhostCounter()), acct{e.config.NetNS}.remove(names.invalidCounter()))
}
