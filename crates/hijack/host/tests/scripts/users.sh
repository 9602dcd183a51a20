# needs: setpriv id
# Programs of another user: the executive's board is lent to them, after a first try without that.
for i in 1 2 3; do
    setpriv --reuid 65534 --regid 65534 --clear-groups sh -c 'id -u; id -g; ls / > /dev/null; cat /etc/hostname > /dev/null; exit 3'; echo $?
done
